"""Changes of a model's weights that leave what it computes as it is (``spec/folding.md``)."""
