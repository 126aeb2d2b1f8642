"""`--report`: what a run did, as one page for people and as JSON for programs."""
