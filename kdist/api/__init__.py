"""What users call: `parallelize`, custom loops, `inspect`, `ShardedOptimizer`, `PipelineModel`."""
