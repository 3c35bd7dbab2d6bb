// Reads `qos` (tables and fields as in SONiC's CONFIG_DB) and `spillway` into the traffic manager's
// configuration. Start-up only.
#pragma once

#include "switch/config.h"
#include "switch/yaml_reader.h"

namespace millrace::switching {

// Ports, frames and aggregation have been read already. Without the key `qos` there is no traffic manager.
void read_qos(YamlMap& top, Config& config);
// Behind read_qos().
void read_spillway(YamlMap& top, Config& config);

}  // namespace millrace::switching
