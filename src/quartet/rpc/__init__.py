"""How calls are made and served: servers, channels, deadlines, errors. It knows no room's methods.

policy.py holds every number; errors.py is the only place where exceptions and gRPC status meet.
"""

import os

# gRPC's C core tells standard error of every connection that a peer closes. Its errors reach us
# as exceptions; a user who wants the rest sets the variable.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
