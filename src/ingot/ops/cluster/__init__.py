"""Operations whose work is done by many workers: each item of what they open, or a plan's steps."""
