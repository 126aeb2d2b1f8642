"""This room holds the requests, the scheduler, the KV blocks and the loop of one replica. It knows no torch or text."""
