// scape-info: version, build, transports, SIMD targets and the settings in force.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/settings.h"
#include "kernels/kernels.h"
#include "plugin/transport/transport.h"
#include "scape/scape.h"

namespace {

using scape::SettingRow;

// A cell of a Markdown table: bars would end it.
std::string cell(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

void print_markdown() {
  std::puts(
      "# Settings\n\n"
      "Environment variables, read once, at the first NCCL or Scape call of a process. This page "
      "is printed by\n"
      "`scape-info --markdown` from the registry in `base/settings_list.h`; `scape-info` alone "
      "prints the values in "
      "force.\n"
      "A bad value stops the first call with the name, the value and the range; an unknown "
      "`SCAPE_*` name gives one\n"
      "warning with the nearest known one. Unknown names are looked for in the environment that "
      "the "
      "process was started\n"
      "with.\n\n"
      "| variable | type | range | default | meaning |\n|---|---|---|---|---|");
  for (const SettingRow& row : scape::settings_rows()) {
    std::printf(
        "| `%s` | %s | %s | %s | %s |\n", row.name.c_str(), row.type.c_str(),
        cell(row.range).c_str(),
        row.fallback.empty() ? "–" : scape::format("`%s`", cell(row.fallback).c_str()).c_str(),
        cell(row.help).c_str());
  }
}

// Where the value in force is not the environment's word for it: that word, and whether it was
// refused.
std::string origin(const SettingRow& row) {
  const char* text = row.from_environment ? std::getenv(row.name.c_str()) : nullptr;
  if (text == nullptr || row.value == text) return "";
  return scape::format(
      row.problem.ok() ? " (from \"%.64s\")" : " (\"%.64s\" is REFUSED, see below)", text);
}

void print_report() {
  std::printf("scape %s (C API %d)\n", SCAPE_VERSION_STRING, SCAPE_VERSION_CODE);
#if defined(__clang__)
  std::printf("built with %s\n", __VERSION__);
#else
  std::printf("built with gcc %s\n", __VERSION__);
#endif
  std::printf("\ntransports\n");
  for (const std::string_view name : scape::plugin::transport_names()) {
    const scape::plugin::TransportModule* module = nullptr;
    const scape::Status status = scape::plugin::load_transport_module(name, &module);
    std::printf("  %-8s %s\n", std::string(name).c_str(),
                status.ok() ? "found" : status.message().c_str());
  }
  std::printf("\nkernels, best first\n ");
  for (const auto* ops : scape::kernels::available_ops()) std::printf(" %s", ops->name);
  std::printf("\n  in use: %s\n", scape::kernels::ops().name);
  std::printf("\nsettings (* from the environment)\n");
  for (const SettingRow& row : scape::settings_rows()) {
    std::printf("%c %-24s %s%s\n", row.from_environment ? '*' : ' ', row.name.c_str(),
                row.value.c_str(), origin(row).c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Prints Scape's version, build, transports, SIMD targets and settings in force.");
  bool markdown = false;
  app.add_flag("--markdown", markdown, "print docs/settings.md instead");
  app.set_version_flag("--version", SCAPE_VERSION_STRING);
  CLI11_PARSE(app, argc, argv);
  if (markdown) {
    print_markdown();
    return 0;
  }
  print_report();
  for (const std::string& warning : scape::settings_warnings())
    std::fprintf(stderr, "warning: %s\n", warning.c_str());
  for (const SettingRow& row : scape::settings_rows()) {
    if (!row.problem.ok()) std::fprintf(stderr, "error: %s\n", row.problem.message().c_str());
  }
  return scape::settings_status().ok() ? 0 : 1;
}
