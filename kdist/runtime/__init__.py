"""Steps and the runners that execute them, on plain devices, inner axes and pipelines."""
