"""The parent's side of a run: resolves what a job is, plans it, and carries its rows to the engines and back."""
