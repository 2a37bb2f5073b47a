"""Fine-tuning with transformers' Trainer: settings, one module for each task, LoRA, metrics and results."""
