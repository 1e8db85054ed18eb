"""Programs that use syncengine as any training script would."""
