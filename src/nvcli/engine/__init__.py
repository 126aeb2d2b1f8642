"""Requests, scheduler, KV block manager and the engine loop of one replica. Knows no torch, text or ranks."""
