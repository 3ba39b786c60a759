"""Authenticated connections: both ends prove that they have the job's secret.

Workers, launchers on several machines and features connect through this package, which
does not import TensorFlow. Reading order:
    handshake: messages and checks of both ends, run over a socket
    secret: the job's secret, read from a file or generated for one job
    acceptor: thread that accepts connections, with limits on unauthenticated ones
    messages: JSON messages over a connection, each with an HMAC
"""
