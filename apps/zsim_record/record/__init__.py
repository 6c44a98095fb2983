"""Record the streams and memory accesses of a training script on a simulated accelerator."""
