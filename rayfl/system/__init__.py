"""Simulated devices and time: the `system:` section, the fleet, and the schedule of rounds."""

from rayfl.system.availability import AVAILABILITY_KIND as AVAILABILITY_KIND
from rayfl.system.availability import Availability as Availability
from rayfl.system.devices import DEVICES_KIND as DEVICES_KIND
from rayfl.system.devices import Device as Device
from rayfl.system.devices import Devices as Devices
from rayfl.system.devices import Speed as Speed
from rayfl.system.fleet import Fleet as Fleet
from rayfl.system.fleet import Work as Work
from rayfl.system.samplers import SAMPLERS_KIND as SAMPLERS_KIND
from rayfl.system.samplers import Candidates as Candidates
from rayfl.system.samplers import Sampler as Sampler
from rayfl.system.samplers import Visited as Visited
from rayfl.system.schedule import Past as Past
from rayfl.system.schedule import Plan as Plan
from rayfl.system.schedule import Schedule as Schedule
from rayfl.system.schedule import Timed as Timed
from rayfl.system.schedule import Untimed as Untimed
from rayfl.system.settings import System as System
from rayfl.system.staleness import Stale as Stale
from rayfl.system.staleness import Staleness as Staleness
