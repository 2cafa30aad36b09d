/* Stands before the C library: lets the n-th call of a kind fail, below one folder.

   Loaded by LD_PRELOAD. FAILING_BELOW names the folder; `failing_arm` says which call. Calls are
   those of Python and of every library in the process, as each of them asks the C library. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { WRITE, SYNC, RENAME, OPEN, TRUNCATE, REMOVE, MAKE, KINDS };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long calls[KINDS], first = -1;
static int armed = -1, wanted_errno, sticky, fired;

/* Calls of a kind since they were counted anew; has the one of a number fail, from 0 on.

   `errno_or_0` of 0: only half is written. `and_later`: all that follow fail too. */
void failing_arm(int kind, long number, int errno_or_0, int and_later) {
  pthread_mutex_lock(&lock);
  memset(calls, 0, sizeof calls);
  armed = kind, first = number, wanted_errno = errno_or_0, sticky = and_later, fired = 0;
  pthread_mutex_unlock(&lock);
}

long failing_count(int kind) { return calls[kind]; }
int failing_fired(void) { return fired; }

static int below(const char *path) {
  const char *folder = getenv("FAILING_BELOW");
  return folder != NULL && strncmp(path, folder, strlen(folder)) == 0;
}

static int path_of(int at, const char *path, char *whole) {
  char name[64];
  if (path != NULL && path[0] == '/') {
    snprintf(whole, PATH_MAX, "%s", path);
    return 1;
  }
  if (at == AT_FDCWD) snprintf(name, sizeof name, "/proc/self/cwd");
  else snprintf(name, sizeof name, "/proc/self/fd/%d", at);
  int saved = errno;
  ssize_t n = readlink(name, whole, PATH_MAX - 1);
  errno = saved;
  if (n < 0) return 0;
  whole[n] = 0;
  if (path != NULL) snprintf(whole + n, PATH_MAX - n, "/%s", path);
  return 1;
}

/* Whether this call is to fail: 1 with errno set, 2 for half of a write. */
static int fails(enum kind kind, int at, const char *path) {
  char whole[PATH_MAX];
  if (!path_of(at, path, whole) || !below(whole)) return 0;
  pthread_mutex_lock(&lock);
  long number = calls[kind]++;
  int hit = armed == (int)kind && (number == first || (sticky && number > first));
  if (hit) fired++;
  pthread_mutex_unlock(&lock);
  if (!hit) return 0;
  errno = wanted_errno;
  return wanted_errno ? 1 : 2;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define GUARD(kind, at, path) if (fails(kind, at, path)) return -1

ssize_t write(int fd, const void *data, size_t n) {
  int how = fails(WRITE, fd, NULL);
  return how == 1 ? -1 : REAL(write)(fd, data, how == 2 ? (n + 1) / 2 : n);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
  int how = fails(WRITE, fd, NULL);
  return how == 1 ? -1 : REAL(pwrite)(fd, data, how == 2 ? (n + 1) / 2 : n, at);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
  int how = fails(WRITE, fd, NULL);
  return how == 1 ? -1 : REAL(pwrite64)(fd, data, how == 2 ? (n + 1) / 2 : n, at);
}
ssize_t writev(int fd, const struct iovec *all, int count) {
  int how = fails(WRITE, fd, NULL);
  if (how == 1) return -1;
  if (how == 2 && count > 0) return REAL(write)(fd, all[0].iov_base, (all[0].iov_len + 1) / 2);
  return REAL(writev)(fd, all, count);
}
int fsync(int fd) { GUARD(SYNC, fd, NULL); return REAL(fsync)(fd); }
int fdatasync(int fd) { GUARD(SYNC, fd, NULL); return REAL(fdatasync)(fd); }
int rename(const char *a, const char *b) { GUARD(RENAME, AT_FDCWD, a); return REAL(rename)(a, b); }
int renameat(int i, const char *a, int j, const char *b) {
  GUARD(RENAME, i, a);
  return REAL(renameat)(i, a, j, b);
}
int renameat2(int i, const char *a, int j, const char *b, unsigned f) {
  GUARD(RENAME, i, a);
  return REAL(renameat2)(i, a, j, b, f);
}
int link(const char *a, const char *b) { GUARD(RENAME, AT_FDCWD, b); return REAL(link)(a, b); }
int linkat(int i, const char *a, int j, const char *b, int f) {
  GUARD(RENAME, j, b);
  return REAL(linkat)(i, a, j, b, f);
}
int ftruncate(int fd, off_t n) { GUARD(TRUNCATE, fd, NULL); return REAL(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) { GUARD(TRUNCATE, fd, NULL); return REAL(ftruncate64)(fd, n); }
int unlink(const char *a) { GUARD(REMOVE, AT_FDCWD, a); return REAL(unlink)(a); }
int unlinkat(int i, const char *a, int f) { GUARD(REMOVE, i, a); return REAL(unlinkat)(i, a, f); }
int rmdir(const char *a) { GUARD(REMOVE, AT_FDCWD, a); return REAL(rmdir)(a); }
int mkdir(const char *a, mode_t m) { GUARD(MAKE, AT_FDCWD, a); return REAL(mkdir)(a, m); }
int mkdirat(int i, const char *a, mode_t m) { GUARD(MAKE, i, a); return REAL(mkdirat)(i, a, m); }

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT); }

#define OPENS(name)                                                        \
  int name(const char *path, int flags, ...) {                             \
    va_list more;                                                          \
    va_start(more, flags);                                                 \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more);                                                          \
    if (writes(flags)) GUARD(OPEN, AT_FDCWD, path);                        \
    return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(path, flags, mode); \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                     \
  int name(int at, const char *path, int flags, ...) {                     \
    va_list more;                                                          \
    va_start(more, flags);                                                 \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more);                                                          \
    if (writes(flags)) GUARD(OPEN, at, path);                              \
    return ((int (*)(int, const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(at, path, flags, mode); \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

int __openat_2(int at, const char *path, int flags) {
  if (writes(flags)) GUARD(OPEN, at, path);
  return ((int (*)(int, const char *, int))dlsym(RTLD_NEXT, "__openat_2"))(at, path, flags);
}
