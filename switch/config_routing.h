// The part of the configuration that makes a router of the switch: addresses with their subnets, routes, and
// what goes with them. Called by parse_config() only.
#pragma once

#include "switch/config.h"
#include "switch/yaml_reader.h"

namespace millrace::switching {

// The addresses of one interface, `addresses` of `map`: the bridge's, or a port's, which is routed by having
// them.
void read_interface(YamlMap& map, uint16_t interface, Config& config);
// `routes` and `routing`; after all interfaces.
void read_routing(YamlMap& top, Config& config);
// `aggregation.parent`; after all routes.
void read_parent(YamlMap& top, Config& config);

}  // namespace millrace::switching
