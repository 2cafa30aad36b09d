"""Starts the processes of one program on this machine; see `python -m kdist.launch --help`."""
