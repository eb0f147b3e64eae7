"""Commands with which an operator sees a running federation and acts on it."""
