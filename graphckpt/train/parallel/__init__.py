"""Training over several processes: data, tensor and pipeline parallelism, and FSDP2."""
