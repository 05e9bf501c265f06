"""How calls are made and served: servers, channels, deadlines, errors. It knows no room's methods.

policy.py holds every number; errors.py is the only place where exceptions and gRPC status meet.
"""
