"""Tests of `kdist.pipeline`: schedules, their simulation and charts, the partition of a model."""
