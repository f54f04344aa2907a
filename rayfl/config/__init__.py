"""Typed, frozen configuration sections, classes chosen by `name`, and configuration errors."""

from rayfl.config.errors import PLAIN_WORDS as PLAIN_WORDS
from rayfl.config.errors import ConfigError as ConfigError
from rayfl.config.errors import choose as choose
from rayfl.config.errors import explain as explain
from rayfl.config.errors import kinds_of as kinds_of
from rayfl.config.errors import nearest as nearest
from rayfl.config.errors import unknown as unknown
from rayfl.config.failures import PluginFailed as PluginFailed
from rayfl.config.failures import Problem as Problem
from rayfl.config.failures import RunFailed as RunFailed
from rayfl.config.failures import ask as ask
from rayfl.config.failures import require as require
from rayfl.config.failures import require_number as require_number
from rayfl.config.files import differences as differences
from rayfl.config.files import load_yaml as load_yaml
from rayfl.config.files import parse_setting as parse_setting
from rayfl.config.files import set_path as set_path
from rayfl.config.imports import imported as imported
from rayfl.config.imports import with_options as with_options
from rayfl.config.plain import shown as shown
from rayfl.config.sections import Config as Config
from rayfl.config.sections import Kind as Kind
from rayfl.config.sections import Named as Named
from rayfl.config.sections import component as component
from rayfl.config.sections import parse as parse
