"""Hosts: versions in memory that others read without asking, and engines that take them from there.

Not part of a training loop's straight way through a store: what joins a running fleet, and the parameter
server's mode.
"""

from syncline.hosts.entering import EnterReport, enter
from syncline.hosts.host import VersionHost
from syncline.hosts.joining import JoinReport, join
from syncline.hosts.live import LiveEngine
from syncline.hosts.meeting import meet_in_directory
from syncline.hosts.offer import Offer, load_offer
from syncline.hosts.planning import Fleet
from syncline.hosts.server import ParameterServer, UpdateReport
from syncline.hosts.worker import Worker

__all__ = [
    "EnterReport",
    "Fleet",
    "JoinReport",
    "LiveEngine",
    "Offer",
    "ParameterServer",
    "UpdateReport",
    "VersionHost",
    "Worker",
    "enter",
    "join",
    "load_offer",
    "meet_in_directory",
]
