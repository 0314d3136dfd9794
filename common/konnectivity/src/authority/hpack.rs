//! The walk over a compressed header block (HPACK, RFC 7541) that finds `:authority` values.
//!
//! The walk keeps one piece of compression state: which entries of the peer's dynamic table have the name
//! `:authority`. Strings are skipped by length and never decompressed.

use bytes::BytesMut;

use super::PLACEHOLDER;

/// The name `:authority` without Huffman coding.
const NAME: &[u8] = b":authority";
/// The only Huffman form of the name (57 bits of code and 7 padding bits, all ones).
pub(super) const NAME_HUFFMAN: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];
/// Index of `:authority` in the static table (RFC 7541, appendix A).
const STATIC_AUTHORITY: usize = 1;
/// Last index of the static table.
const STATIC_LAST: usize = 61;
/// Largest number of entries in a dynamic table. Each entry counts at least 32 bytes (RFC 7541, section 4.1),
/// and the table has 4096 bytes, because the server leaves SETTINGS_HEADER_TABLE_SIZE at its initial value.
const DYNAMIC_ENTRIES: usize = 4096 / 32;

/// One bit per entry of the dynamic table, the newest entry in bit 0: set if the name is `:authority`.
///
/// Evictions are not tracked: the server rejects an index beyond the last entry.
#[derive(Debug, Default)]
pub(super) struct AuthorityNames(u128);

const _: () = assert!(u128::BITS as usize == DYNAMIC_ENTRIES);

impl AuthorityNames {
    /// Appends `block` to `output` with the value of each `:authority` literal replaced. Returns true if
    /// there was such a literal, or `None` if the block is malformed; `output` is then useless.
    pub(super) fn rewrite(&mut self, block: &[u8], output: &mut BytesMut) -> Option<bool> {
        let mut rest = block;
        // Bytes from here on are not copied yet.
        let mut pending = block;
        let mut found = false;
        while let Some(&first) = rest.first() {
            // The position of the first one bit gives the representation (RFC 7541, section 6).
            let insert = match first.leading_zeros() {
                0 => {
                    self.indexed(&mut rest)?;
                    continue;
                }
                1 => true,
                2 => {
                    integer(&mut rest, 5)?;
                    continue;
                }
                _ => false,
            };
            let is_authority = self.name(&mut rest, if insert { 6 } else { 4 })?;
            let before_value = rest.len();
            string(&mut rest)?;
            if is_authority {
                found = true;
                let (copied, _) = pending.split_at_checked(pending.len() - before_value)?;
                output.extend_from_slice(copied);
                // The new value: length 1 with the Huffman bit clear, then the placeholder.
                output.extend_from_slice(&[1, PLACEHOLDER]);
                pending = rest;
            }
            if insert {
                self.0 = self.0 << 1 | u128::from(is_authority);
            }
        }
        output.extend_from_slice(pending);
        Some(found)
    }

    /// Skips an indexed field. The value needs no replacement: static entry 1 has no value, and the values of
    /// dynamic entries were replaced at insertion.
    fn indexed(&self, rest: &mut &[u8]) -> Option<()> {
        let index = integer(rest, 7)?;
        (1..=STATIC_LAST + DYNAMIC_ENTRIES)
            .contains(&index)
            .then_some(())
    }

    /// Skips the name of a literal (an index or a string), and returns true if the name is `:authority`.
    fn name(&self, rest: &mut &[u8], prefix_bits: u32) -> Option<bool> {
        let is_authority = match integer(rest, prefix_bits)? {
            0 => match string(rest)? {
                (false, text) => text == NAME,
                (true, code) => code == NAME_HUFFMAN,
            },
            index if index <= STATIC_LAST => index == STATIC_AUTHORITY,
            index => {
                let entry = index - STATIC_LAST - 1;
                if entry >= DYNAMIC_ENTRIES {
                    return None;
                }
                self.0 >> entry & 1 == 1
            }
        };
        Some(is_authority)
    }
}

/// Reads a string (RFC 7541, section 5.2). Returns a flag for Huffman coding, and the bytes as received.
fn string<'a>(rest: &mut &'a [u8]) -> Option<(bool, &'a [u8])> {
    let huffman = rest.first()? & 0x80 != 0;
    let len = integer(rest, 7)?;
    let (bytes, behind) = rest.split_at_checked(len)?;
    *rest = behind;
    Some((huffman, bytes))
}

/// Reads an integer (RFC 7541, section 5.1) of at most five bytes, as `h2` does: 28 bits are far more than
/// any correct length or index here.
fn integer(rest: &mut &[u8], prefix_bits: u32) -> Option<usize> {
    let mask = (1 << prefix_bits) - 1;
    let mut value = usize::from(byte(rest)? & mask);
    if value < usize::from(mask) {
        return Some(value);
    }
    for shift in [0, 7, 14, 21] {
        let next = byte(rest)?;
        value += usize::from(next & 0x7f) << shift;
        if next & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn byte(rest: &mut &[u8]) -> Option<u8> {
    let (&first, behind) = rest.split_first()?;
    *rest = behind;
    Some(first)
}
