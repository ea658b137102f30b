from bayou.select.auto import Auto as Auto
from bayou.select.held_out import BySize as BySize, HeldOut as HeldOut
from bayou.select.layers import with_dropout as with_dropout
from bayou.select.named import by_name as by_name, list_methods as list_methods
from bayou.select.settings import Training as Training
from bayou.select.where import Where as Where
