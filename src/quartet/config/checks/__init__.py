"""Dependencies between values, one module a subject.

Each check is a function from a configuration to the errors it found. None looks at the machine:
that is `quartet.config.runnable`.
"""
