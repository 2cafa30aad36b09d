"""What a step will do, known before it runs: who updates what, what travels, in which buckets."""
