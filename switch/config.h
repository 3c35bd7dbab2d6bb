// The switch's configuration: one YAML file, validated whole before anything starts. Every mistake is a
// millrace::Error that names the file, the line, the key and what is allowed. Called at start-up only.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "aggregation/engine.h"
#include "buffering/config.h"
#include "buffering/remote_store.h"
#include "switch/capture.h"
#include "switch/impair.h"
#include "switch/l2.h"
#include "switch/router.h"

namespace millrace::switching {

struct PortConfig {
  std::string name;
  std::string device;  // DPDK devargs or a PCI address
  std::optional<CaptureConfig> capture;
  ImpairConfig rx, tx;
};

struct IdleConfig {
  Time spin{};       // without work before the first sleep
  Time sleep_max{};  // of one sleep; 0: never sleep
};

struct Config {
  std::string name;
  aggregation::EngineConfig engine;  // with the switch's own MAC and all of its addresses
  L2Config l2;
  RoutingConfig routing;  // interfaces: the addresses again, with their subnets
  std::vector<PortConfig> ports;
  std::optional<buffering::Config> buffers;  // traffic manager and spillway, by `qos`; its ports are these
  std::optional<buffering::RemoteStoreConfig> lenders;  // of memory for the spillway
  uint64_t spill_local = 0;                             // with lenders: bytes that stay here, used first
  std::optional<CaptureConfig> capture;                 // of all ports together
  IdleConfig idle;
  uint32_t frame_count = 16384;
  uint32_t spill_frames = 0;   // beyond frame_count, for what is spilled and stays here
  uint32_t frame_room = 4608;  // bytes, headroom included
  std::vector<std::string> eal;
  std::optional<uint32_t> lcore;             // CPU that the worker is pinned to
  std::string control_read, control_change;  // socket paths; empty: none
  std::string log_level = "info";
  std::vector<std::string> notes;  // what was adapted on the way, to be logged once
};

Config load_config(const std::string& file);
// `name` is what errors call the file.
Config parse_config(const std::string& text, const std::string& name);

// "4096", "64KiB", "1GiB"; std::nullopt for anything else.
std::optional<uint64_t> parse_size(std::string_view text);

}  // namespace millrace::switching
