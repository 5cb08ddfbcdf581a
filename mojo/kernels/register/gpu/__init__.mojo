"""The kernels as MAX graph ops on GPUs: shapes checked, entries launched."""
