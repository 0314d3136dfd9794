package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"flag"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// runCerts writes a CA and the pairs server (front end), cluster (agent
// listener), client (API server) and agent, as NAME.crt and NAME.key.
func runCerts(args []string) (result, error) {
	fs := flag.NewFlagSet("certs", flag.ContinueOnError)
	dir := fs.String("out", "", "directory to write to")
	if err := parse(fs, args); err != nil {
		return nil, err
	}
	if *dir == "" {
		return nil, errors.New("--out is required")
	}
	if err := os.MkdirAll(*dir, 0o700); err != nil {
		return nil, err
	}
	ca := template("ca", 1)
	ca.IsCA, ca.BasicConstraintsValid, ca.KeyUsage = true, true, x509.KeyUsageCertSign
	caKey, err := issue(*dir, ca, ca, nil)
	if err != nil {
		return nil, err
	}
	for i, name := range []string{"server", "cluster", "client", "agent"} {
		if _, err := issue(*dir, template(name, int64(i)+2), ca, caKey); err != nil {
			return nil, err
		}
	}
	return result{"out": *dir}, nil
}

func template(name string, serial int64) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(serial),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().AddDate(1, 0, 0),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:     []string{"localhost"},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
}

// issue signs cert with the CA's key, or with its own if caKey is nil, and
// writes the pair. It returns the new key.
func issue(dir string, cert, ca *x509.Certificate, caKey *ecdsa.PrivateKey) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	if caKey == nil {
		caKey = key
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, ca, &key.PublicKey, caKey)
	if err != nil {
		return nil, err
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	base := filepath.Join(dir, cert.Subject.CommonName)
	return key, errors.Join(
		os.WriteFile(base+".crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644),
		os.WriteFile(base+".key", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER}), 0o600))
}
