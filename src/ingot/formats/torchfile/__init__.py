"""Files that ``torch.save`` wrote (``spec/torch.md``)."""
