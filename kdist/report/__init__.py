"""What executed steps are measured by: memory per device, graphs, communication alone."""
