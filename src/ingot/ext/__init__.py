"""Extensions that ship with Ingot. They register like plugins; nothing below imports them."""
