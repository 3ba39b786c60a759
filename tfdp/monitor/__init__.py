"""What a training run tells about its communication: measured, merged, shown."""
