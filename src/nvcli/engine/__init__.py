"""Requests, the scheduler, the KV blocks and the loop of one replica. Free of torch and text."""
