"""Where ranks run, and the addresses at which their hosts reach each other."""

import socket

import pytest

from multimesh.errors import StartupError
from multimesh.launch import places
from multimesh.launch.places import Place, check_routes, meeting_address, own_place, ranks_at

A, B, C = Place("a"), Place("b"), Place("c")


@pytest.fixture
def routes(monkeypatch):
    """Sets which address this host has towards which others."""

    def set_routes(table):
        def address_towards(host):
            if host not in table:
                raise OSError(f"no route to {host}")
            return table[host]

        monkeypatch.setattr(places, "address_towards", address_towards)

    return set_routes


def test_this_process():
    assert own_place() == own_place()
    assert own_place().host == socket.gethostname()


def test_ranks_of_a_place():
    assert ranks_at(B, [A, B, A, B, C]) == [1, 3]
    # Containers, or machines made from one image, may have one name.
    assert ranks_at(Place("a", "1"), [Place("a", "1"), Place("a", "2")]) == [0]


def test_ranks_of_one_host_meet_at_a_loopback_address(routes):
    routes({})
    assert meeting_address(A, [A, A]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("table", "address"),
    [
        ({"b": "10.0.0.1", "192.0.2.1": "192.168.0.1"}, "10.0.0.1"),
        # Names that are unknown here, or known as this host itself, lead nowhere.
        ({"c": "10.1.0.1"}, "10.1.0.1"),
        ({"b": "127.0.0.1", "c": "10.1.0.1"}, "10.1.0.1"),
        ({"b": "127.0.0.1", "192.0.2.1": "192.168.0.1"}, "192.168.0.1"),
        ({"b": "::1", "2001:db8::1": "fd00::1"}, "fd00::1"),
    ],
)
def test_the_address_towards_other_hosts(routes, table, address):
    routes(table)
    assert meeting_address(A, [A, B, A, C]) == address


def test_a_host_without_a_network(routes):
    routes({"b": "127.0.0.1"})
    with pytest.raises(StartupError, match=r"a has no network address at which b, c could reach"):
        meeting_address(A, [A, B, C])


class Ranks:
    """In place of a communicator: one rank is real, and the answers of the others are given."""

    def __init__(self, rank, *answers):
        self._rank = rank
        self._answers = iter(answers)

    def Get_rank(self):
        return self._rank

    def allgather(self, mine):
        answers = list(next(self._answers))
        answers.insert(self._rank, mine)
        return answers


def test_hosts_that_reach_each_other():
    with socket.create_server(("127.0.0.1", 0)) as other:
        check_routes(Ranks(0, [other.getsockname()], [[]]), [A, B], "127.0.0.1")


def test_hosts_that_do_not_reach_each_other():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    ranks = Ranks(2, [address, ("", 0)], [[], []])
    with pytest.raises(StartupError, match=r"b to a at 127\.0\.0\.1 .*firewall"):
        check_routes(ranks, [A, A, B], "127.0.0.1")


def test_the_error_of_another_host_is_raised_here_too():
    ranks = Ranks(1, [("", 0)], [["a to b at 10.0.0.2 (timed out)"]])
    with pytest.raises(StartupError, match=r"a to b at 10\.0\.0\.2 \(timed out\)"):
        check_routes(ranks, [A, A], "127.0.0.1")
