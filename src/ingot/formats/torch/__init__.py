"""Files of ``torch.save``."""
