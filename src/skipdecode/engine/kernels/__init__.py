"""The C++ kernels for CPUs: their library (`library`), their data (`spec`, `weights`) and their calls (`native`)."""
