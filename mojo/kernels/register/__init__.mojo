"""The kernels as MAX graph ops: shapes checked, tiles forked over workers."""
