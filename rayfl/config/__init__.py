"""Typed, frozen configuration sections, classes chosen by `name`, and configuration errors."""

from rayfl.config.failures import PluginFailed as PluginFailed
from rayfl.config.failures import Problem as Problem
from rayfl.config.failures import RunFailed as RunFailed
from rayfl.config.failures import ask as ask
from rayfl.config.failures import require as require
from rayfl.config.failures import require_number as require_number
from rayfl.config.imports import imported as imported
from rayfl.config.imports import with_options as with_options
from rayfl.config.plain import shown as shown
from rayfl.config.sections import PLAIN_WORDS as PLAIN_WORDS
from rayfl.config.sections import Config as Config
from rayfl.config.sections import ConfigError as ConfigError
from rayfl.config.sections import Kind as Kind
from rayfl.config.sections import Named as Named
from rayfl.config.sections import choose as choose
from rayfl.config.sections import component as component
from rayfl.config.sections import differences as differences
from rayfl.config.sections import explain as explain
from rayfl.config.sections import kinds_of as kinds_of
from rayfl.config.sections import load_yaml as load_yaml
from rayfl.config.sections import nearest as nearest
from rayfl.config.sections import parse as parse
from rayfl.config.sections import parse_setting as parse_setting
from rayfl.config.sections import set_path as set_path
from rayfl.config.sections import unknown as unknown
