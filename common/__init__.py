"""Shared vocabulary of Seer's services: ids, types, policies, wire format and transports."""
