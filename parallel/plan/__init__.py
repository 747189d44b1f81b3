"""Plans a step without GPUs: memory, communication and computation on simulated ranks."""
