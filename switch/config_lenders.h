// Reads the lenders of memory out of the `spillway` map (buffering/REMOTE.md). Start-up only.
#pragma once

#include "switch/config.h"
#include "switch/yaml_reader.h"

namespace millrace::switching {

// `map` is `spillway`, of which the rest has been read already.
void read_lenders(YamlMap& map, Config& config);

}  // namespace millrace::switching
