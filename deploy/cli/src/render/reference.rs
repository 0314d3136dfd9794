//! References of images, by the grammar of Docker (`regexp.go` of github.com/distribution/reference).
//!
//! A reference is `HOST/PATH:TAG@DIGEST`, where only the path is required. Container runtimes pull an image without a host
//! from docker.io.

use std::net::Ipv6Addr;

/// Longest path, in characters.
const MAX_PATH: usize = 255;

/// Longest tag, in characters.
const MAX_TAG: usize = 128;

/// Longest default name of an image. It follows a registry, and counts for the length of the path.
const LONGEST_IMAGE: &str = "culvert-node-tunnel";

/// Checks a reference.
///
/// # Errors
/// Fails with the first wrong part, and the rule for the part.
pub(super) fn check_image(text: &str) -> Result<(), String> {
    let (text, digest) = match text.split_once('@') {
        Some((text, digest)) => (text, Some(digest)),
        None => (text, None),
    };
    let (name, tag) = match text.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (text, None),
    };
    check_name(name)?;
    if let Some(tag) = tag.filter(|tag| !is_tag(tag)) {
        return Err(format!(
            "the tag {tag:?} is wrong: a tag has at most {MAX_TAG} letters, digits, underscores, dots and dashes, and begins \
             with none of the last two"
        ));
    }
    if let Some(digest) = digest.filter(|digest| !is_digest(digest)) {
        return Err(format!(
            "the digest {digest:?} is wrong: sha256 has 64 hexadecimal digits in lower case, sha384 has 96, and sha512 has 128"
        ));
    }
    Ok(())
}

/// Checks a registry with its folders.
///
/// # Errors
/// Fails with the first wrong part, and the rule for the part.
pub(super) fn check_registry(text: &str) -> Result<(), String> {
    let text = text.trim_end_matches('/');
    check_name(&format!("{text}/{LONGEST_IMAGE}"))
}

/// Returns true if a reference has a host. Without a host, nodes pull the image from docker.io.
pub(super) fn has_host(text: &str) -> bool {
    split_host(text).0.is_some()
}

fn check_name(name: &str) -> Result<(), String> {
    let (host, path) = split_host(name);
    if let Some(host) = host.filter(|host| !is_host(host)) {
        return Err(format!(
            "the host {host:?} is wrong: a host has letters, digits and dashes between dots, or is an IPv6 address in brackets, \
             and has a port from 1 to 65535 or none"
        ));
    }
    if let Some(part) = path.split('/').find(|part| !is_component(part)) {
        let hint = match host {
            Some(_) => "",
            None => {
                ". The first part is a host only if it has a dot, a port or an upper-case letter, or is localhost"
            }
        };
        return Err(format!(
            "the part {part:?} is wrong: a part of the path has lower-case letters and digits, and between them a dot, one or \
             two underscores, or dashes{hint}"
        ));
    }
    if path.len() > MAX_PATH {
        return Err(format!("the path has more than {MAX_PATH} characters"));
    }
    Ok(())
}

/// Splits a name into host and path.
fn split_host(name: &str) -> (Option<&str>, &str) {
    match name.split_once('/') {
        Some((first, rest)) if is_host_like(first) => (Some(first), rest),
        _ => (None, name),
    }
}

/// Returns true if container runtimes take the first part of a name for a host.
fn is_host_like(first: &str) -> bool {
    let has_upper_case = first.chars().any(|c| c.is_ascii_uppercase());
    first == "localhost" || first.contains(['.', ':']) || has_upper_case
}

fn is_host(text: &str) -> bool {
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (text, None),
    };
    let is_name = match name.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').is_some_and(is_ipv6),
        None => name.split('.').all(is_label),
    };
    is_name && port.is_none_or(is_port)
}

/// Returns true for an IPv6 address without an IPv4 part, which the grammar does not have.
fn is_ipv6(text: &str) -> bool {
    !text.contains('.') && text.parse::<Ipv6Addr>().is_ok()
}

fn is_label(text: &str) -> bool {
    let is_permitted = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let is_framed = !text.starts_with('-') && !text.ends_with('-');
    !text.is_empty() && is_framed && text.chars().all(is_permitted)
}

fn is_port(text: &str) -> bool {
    let is_number = text.chars().all(|c| c.is_ascii_digit());
    is_number && text.parse::<u16>().is_ok_and(|port| port > 0)
}

fn is_component(text: &str) -> bool {
    let is_framed = text.starts_with(is_alphanumeric) && text.ends_with(is_alphanumeric);
    let is_separator =
        |text: &str| matches!(text, "." | "_" | "__") || text.chars().all(|c| c == '-');
    is_framed && text.split(is_alphanumeric).all(is_separator)
}

fn is_alphanumeric(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit()
}

fn is_tag(text: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_permitted = |c: char| is_word(c) || c == '.' || c == '-';
    text.len() <= MAX_TAG && text.starts_with(is_word) && text.chars().all(is_permitted)
}

fn is_digest(text: &str) -> bool {
    let Some((algorithm, digits)) = text.split_once(':') else {
        return false;
    };
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return false,
    };
    let is_digit = |c: char| matches!(c, '0'..='9' | 'a'..='f');
    digits.len() == length && digits.chars().all(is_digit)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn digest(algorithm: &str, digits: usize) -> String {
        format!("r.example.com/x@{algorithm}:{}", "a".repeat(digits))
    }

    #[test]
    fn references_of_docker_are_valid() {
        for image in [
            "culvert",
            "culvert:v1",
            "localhost:5000",
            "localhost/x",
            "r/x",
            "r.example.com/culvert-server:v0.1.0",
            "R.Example.COM/x:V1",
            "r:5000/a/b_c/d__e/f---g/h.i:_1",
            "127.0.0.1:5000/x",
            "[2001:db8::1]/x",
            "[2001:DB8::1]:5000/x:v1",
        ] {
            assert_eq!(check_image(image), Ok(()), "{image}");
        }
        for image in [
            digest("sha256", 64),
            digest("sha384", 96),
            digest("sha512", 128),
            digest("sha256", 64).replace('@', ":v1@"),
            format!("r.example.com/{}:{}", "x".repeat(255), "y".repeat(128)),
        ] {
            assert_eq!(check_image(&image), Ok(()), "{image}");
        }
        for registry in [
            "r",
            "r.example.com:5000/a/b/",
            "Foo.com",
            "localhost",
            "[::1]:5000",
        ] {
            assert_eq!(check_registry(registry), Ok(()), "{registry}");
        }
    }

    #[test]
    fn wrong_part_of_an_image_is_named() {
        for (image, part) in [
            ("r.example.com/BAR/x", "the part \"BAR\""),
            ("x/UPPER", "the part \"UPPER\""),
            ("r.example.com/x/", "the part \"\""),
            ("r.example.com/a..b", "the part \"a..b\""),
            ("r.example.com/a_-b", "the part \"a_-b\""),
            ("r.example.com/a___b", "the part \"a___b\""),
            ("r.example.com/-a", "the part \"-a\""),
            ("r.example.com/a.", "the part \"a.\""),
            ("a:b:c", "the part \"a:b\""),
            ("", "the part \"\""),
            ("r_.example.com/x", "the host \"r_.example.com\""),
            ("-r.example.com/x", "the host \"-r.example.com\""),
            ("r.example.com:/x", "the host \"r.example.com:\""),
            ("r.example.com:0/x", "the host \"r.example.com:0\""),
            ("r.example.com:65536/x", "the host \"r.example.com:65536\""),
            ("r.example.com:+1/x", "the host \"r.example.com:+1\""),
            ("::1/x", "the host \"::1\""),
            ("[::g]/x", "the host \"[::g]\""),
            ("r/x:", "the tag \"\""),
            ("r/x:-a", "the tag \"-a\""),
            ("r/x:a+b", "the tag \"a+b\""),
            ("r/x@sha256:abc", "the digest \"sha256:abc\""),
            ("r/x@", "the digest \"\""),
            ("r/x@a@b", "the digest \"a@b\""),
        ] {
            let why = check_image(image).unwrap_err();
            assert!(why.starts_with(part), "{image}: {why}");
        }
        for image in [
            digest("sha256", 63),
            digest("sha512", 64),
            digest("md5", 32),
            digest("sha256", 64).to_uppercase(),
        ] {
            assert!(check_image(&image).is_err(), "{image}");
        }
        let long = format!("r.example.com/{}", "x".repeat(256));
        assert!(check_image(&long).unwrap_err().contains("more than 255"));
        assert!(check_image(&format!("r/x:{}", "y".repeat(129))).is_err());
    }

    #[test]
    fn wrong_part_of_a_registry_is_named() {
        for (registry, part) in [
            ("Foo.com/BAR", "the part \"BAR\""),
            ("foo/BAR", "the part \"BAR\""),
            ("r.example.com/a:v1", "the part \"a:v1\""),
            ("r.example.com/a@sha256:abc", "the part \"a@sha256:abc\""),
            ("r.example.com:port", "the host \"r.example.com:port\""),
        ] {
            let why = check_registry(registry).unwrap_err();
            assert!(why.starts_with(part), "{registry}: {why}");
        }
        let why = check_registry("foo/BAR").unwrap_err();
        assert!(why.contains("a host only if it has a dot"), "{why}");
    }

    #[test]
    fn first_part_with_a_mark_of_hosts_is_a_host() {
        let hosts = [
            "r.example.com/x",
            "r:5000/x",
            "localhost/x",
            "[::1]/x",
            "REG/x",
        ];
        for image in hosts {
            assert_eq!(check_image(image), Ok(()), "{image}");
            assert!(has_host(image), "{image}");
        }
        for image in [
            "x",
            "x:v1",
            "foo/x",
            "foo/r.example.com/x",
            "localhost:5000",
        ] {
            assert!(!has_host(image), "{image}");
        }
    }
}
