"""The version, for what is written to files."""

VERSION = "0.1.0"
