"""Parameter-efficient fine-tuning: LoRA and adapters, virtual tokens, and prefixes of keys and values."""
