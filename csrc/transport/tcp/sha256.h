// SHA-256 (FIPS 180-4) and HMAC (RFC 2104). Pure functions; 32 bytes each.
#pragma once

#include <string>
#include <string_view>

namespace syncengine::tcp {

inline constexpr size_t kDigestBytes = 32;

std::string sha256(std::string_view message);
std::string hmac_sha256(std::string_view key, std::string_view message);

// In a time that does not tell where they differ.
bool equal_digests(std::string_view a, std::string_view b);

}  // namespace syncengine::tcp
