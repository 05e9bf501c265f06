"""What a training step costs: Quartet's learner beside a plain PyTorch loop and the HF Trainer."""
