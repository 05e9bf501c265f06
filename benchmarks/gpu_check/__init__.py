"""What only a GPU can show: pushes by NCCL and by CUDA IPC, sleep, digests."""
