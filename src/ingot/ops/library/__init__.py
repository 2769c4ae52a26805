"""Libraries: bases, fine-tunes and quantized copies in one folder or bucket, each tensor once. Page: spec/store.md."""
