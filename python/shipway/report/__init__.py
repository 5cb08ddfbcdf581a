"""Reports: a summary, a table and a paragraph made from a result and nothing else."""
