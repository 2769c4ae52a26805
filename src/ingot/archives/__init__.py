"""Archives: folders of model files in one ``.zt`` file, restored byte for byte."""
