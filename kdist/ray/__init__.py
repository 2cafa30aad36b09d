"""Ray Train starts, places, retries and scales the processes of one program of kdist.

Imported as `kdist.ray`; needs Ray Train: `pip install "kdist[ray]"`.
"""

try:
    import ray.train as _ray_train
except ImportError as error:
    raise ImportError(
        "kdist.ray needs Ray Train, which is not installed: pip install 'kdist[ray]'. "
        f"Received: {error}"
    ) from error

from kdist.ray.callbacks import Report, ShardedCheckpoint
from kdist.ray.trainer import Trainer

del _ray_train

__all__ = ["Report", "ShardedCheckpoint", "Trainer"]
