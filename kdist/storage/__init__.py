"""Where bytes live: local variables behind logical ones, parts put together, rows, formats."""
