"""MPI without eager messages, so that nothing can rely on them."""

__all__ = ["Synchronous"]


class Synchronous:
    """A communicator without eager messages: no send is done before its receive is posted.

    Open MPI's own limit (OMPI_MCA_btl_sm_eager_limit, at least 80) does not hold back messages of
    less than 300 bytes.
    """

    def __init__(self, communicator):
        self._communicator = communicator

    def __getattr__(self, name):
        return getattr(self._communicator, name)

    def Isend(self, *arguments):
        return self._communicator.Issend(*arguments)
